"""Plans on the step thread: checked, applied to slots and page records, run, answered."""
