"""The native engine: decodes in the trainer's process, with the trainer's weights."""
