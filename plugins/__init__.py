"""Adapter types: one file each, registered under its name when `peftlab` is asked for one."""
