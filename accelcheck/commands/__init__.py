"""The commands of ``accelcheck``, one file each; each lists what it adds as `COMMANDS`."""
