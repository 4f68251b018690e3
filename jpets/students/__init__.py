"""Student groups: several shallow encoders whose pooled vectors are added, in place of one deep one."""
