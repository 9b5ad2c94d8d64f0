"""From a case to its verdict: the way of one case, and the ledger of what is expected to fail."""
