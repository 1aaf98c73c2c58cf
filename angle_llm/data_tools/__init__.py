"""What may be done with data files before a model learns from them: `angle-llm data check`.

`ledger` (what is kept of a file's rows: 8-byte keys) · `findings` (what the keys tell) · `evaluation_sets` (what must not be
trained on) · `wording` (what the model will see) · `report` · `fix` (a cleaned copy) · `check` · `command`.
"""
