"""Readers of labeled data (tables, CoNLL columns, SQuAD, GLUE), tokenization, and windows."""
