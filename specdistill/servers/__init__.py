"""The same suite against a running inference server: its own counters and the clock, in the same report."""
