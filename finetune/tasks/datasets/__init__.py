"""Labeled sets in: tables, CoNLL columns, SQuAD, GLUE, and the pieces they are cut into."""
