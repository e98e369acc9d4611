"""Reports: folders whose pages are rendered from what was measured.

In a report's folder, report.json and samples.jsonl hold what was measured. The other files are
rendered from these two, without torch.
"""
