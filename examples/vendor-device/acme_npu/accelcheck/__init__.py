"""accelcheck's plugin of the Acme NPU: device, technique, ledger. Importing this imports no torch."""
