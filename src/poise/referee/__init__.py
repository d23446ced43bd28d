"""The referee: ``poise compare``, ``poise diagnose`` and ``poise report``."""
