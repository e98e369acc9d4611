"""Measure drafts: suites, measurement, statistics, reports, gates and comparisons."""
