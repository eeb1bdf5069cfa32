"""Command-line tools that are not part of the package."""
