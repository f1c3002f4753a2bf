"""Bytes in tiers with a ledger, blocks with copies in them, and the copies between them."""
