"""`yunion-mps top`: who uses what, drawn again and again while one looks at it."""
