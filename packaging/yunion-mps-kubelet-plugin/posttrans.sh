#!/bin/sh
# After the scripts of the daemon's package, because the plugin uses its modules.
/usr/lib/yunion-mps/maintain plugin-installed
