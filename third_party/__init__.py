"""Shims over other projects, one folder each: the only place that reads private modules."""
