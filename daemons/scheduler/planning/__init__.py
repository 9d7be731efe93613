"""Planning: from queue, slots and pages to the next plan."""
