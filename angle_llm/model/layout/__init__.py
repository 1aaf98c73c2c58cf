"""Layouts of a micro-batch: how texts are arranged into tensors so that few tokens are computed.

token_sequence  texts in one sequence without padding, as a prefix trie or packed
attention       attention between the tokens of such a sequence; `flex` is its FlexAttention kernel
micro_batches   plans micro-batches of a batch, and chooses the layout: `trie`, `packed` or `padded`
support         finds the layouts that a model can compute
"""
