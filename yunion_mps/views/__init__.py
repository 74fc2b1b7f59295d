"""Devices, conditions and what is pending, as the API answers them, and the host at one moment; pure."""
