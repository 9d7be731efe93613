"""Grammars are compiled in processes of their own: a compilation may take seconds and gigabytes, or end its process."""
