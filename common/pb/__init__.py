"""Generated from proto/ by scripts/generate_pb.sh; never edited by hand."""
