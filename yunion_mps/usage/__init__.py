"""What is used of GPUs and devices: whose memory counts where, and what it was in the last hour."""
