"""Pairs of long texts from issues that people closed as duplicates: `github` (the API, page by page, kept on disk) · `records`
(an issue, a comment) · `fetch` (what is read of a repository) · `duplicates` (what was closed as a duplicate of what) ·
`clean` (a text without the answer) · `pairs` (positives, splits) · `negatives` · `overlap` (issues that share words) ·
`settings` and `command` (`angle-llm data issues`).
"""
