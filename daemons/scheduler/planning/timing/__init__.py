"""Times of steps and tokens, learned from past ones, and the number of plans to send ahead."""
