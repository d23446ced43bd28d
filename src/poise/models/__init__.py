"""Everything that uses transformers: loading, the policy, packed passes, attention, memory."""
