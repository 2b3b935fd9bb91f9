"""First-party algorithms, one file each; they import only what a third party may."""
