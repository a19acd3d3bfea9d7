"""Tools that work on the repository itself and are no part of the package."""
