"""Everything that touches transformers: loading, the policy, packed passes, attention, memory."""
