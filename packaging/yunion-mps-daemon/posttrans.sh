#!/bin/sh
/usr/lib/yunion-mps/maintain installed
