"""Layouts of a micro-batch: how the tokens of texts are arranged in tensors, so that a model computes few tokens.

token_sequence  texts in one sequence without padding: a prefix trie, or packed (concatenated) texts
attention       attention between the tokens of such a sequence; `flex` is the FlexAttention kernel
micro_batches   splits a batch into micro-batches, and chooses the layout: `trie`, `packed` or `padded`
support         finds the layouts that a model can compute
"""
