"""Engines: what starts the processes of a sweep; one file each."""
