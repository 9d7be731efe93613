"""Inputs of a step, packed on the host for one copy to the device."""
