"""A report is a folder: report.json and samples.jsonl hold what was measured; the rest is rendered from them, without torch."""
