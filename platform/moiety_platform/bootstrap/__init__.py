"""What a gateway process opens, each with how it goes on when the settings change. Put together by `gateway`."""
