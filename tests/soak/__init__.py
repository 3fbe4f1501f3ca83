"""scripts/soak: many mounts, readers, writers, faults and disturbances for as long as asked, and what must hold."""
