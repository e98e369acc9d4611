"""Diagnose a draft: find out why few of its tokens are accepted, and what to change."""
