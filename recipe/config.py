class UserError(ValueError):
    """A mistake the user can mend. The message names the field or file, the bad value and the way out."""
