"""LLM supervision (AnglE, arXiv 2309.12871, section 4.5): a language model writes sentences of the same and of the opposite
meaning, and what it wrote becomes scored pairs to train on.

    sentences ──► requests ──► [ generators: local model, server ] ──► journal ──► lines ──► filters ──► pairs, report

The journal holds raw answers, so reading and filtering can be changed and done again without asking anybody.
"""
