"""What a run will need, told before anything is loaded: `angle-llm plan`.

ledger      counts the memory of operations, with values or without
step        a training step of a model without weights, through the ledger
memory      from a step to a device: weights, optimizer, processes that share
plan        settings in, forecast out, and how it is shown
"""
