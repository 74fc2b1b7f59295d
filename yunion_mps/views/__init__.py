"""Devices, conditions and what is pending, as the API answers them; pure."""
