"""The HTML report, the model card, and the reader of run folders."""
