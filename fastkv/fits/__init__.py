"""Files of numbers fitted to one model offline: what they hold, how they are stored, which model they belong to."""
