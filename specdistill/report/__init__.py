"""A report is a folder: report.json and samples.jsonl hold what was measured, the rest is rendered from them and can be again.

No torch here: reports are read, judged and rendered on any machine.
"""
