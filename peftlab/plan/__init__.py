"""Plans a run before a machine is booked: compiles its step for a TPU, shows memory and time."""
