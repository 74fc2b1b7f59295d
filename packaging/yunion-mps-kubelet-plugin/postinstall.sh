#!/bin/sh
set -e
case $1 in
configure) /usr/lib/yunion-mps/maintain plugin-installed ;; # rpm does it in posttrans.sh
esac
