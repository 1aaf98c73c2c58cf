"""Parts of `eval/duplicate_issues.py`: issues from GitHub, and their texts."""
