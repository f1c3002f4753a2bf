"""Tiers with byte budgets and a ledger, blocks with copies in the tiers, and the queues that copy between tiers."""
