"""The supported families: each module defines the `LAYOUT` of one."""
