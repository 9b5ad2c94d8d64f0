"""The base of errors that tell users what to change."""


class InputError(ValueError):
    """Input of a user that cannot be used: commands and pytest print the message, which says why, and exit with 4."""
