"""What accelcheck knows of the Acme NPU: its device, a technique of its own, its ledger. Importing this imports no torch."""
