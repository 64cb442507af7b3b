"""What runs in the inner loop over the page pool: paged attention and the check of a page's owner tag.

Today one torch path that works on any device for any page size, head count and dtype.
"""
