// An OpenID Connect issuer on this machine, whose clients get tokens by client_credentials.
//
//     node oidc_provider.mjs PORT SETTINGS.json
//
// The settings: `keys` as JWKs, the first of which signs; `clients`, each with its secret, the claims of its tokens and
// how many seconds they last.

import { readFileSync } from "node:fs";
import Provider from "oidc-provider";

const [port, file] = process.argv.slice(2);
const settings = JSON.parse(readFileSync(file, "utf8"));
const clientOf = (id) => settings.clients.find((client) => client.id === id);

const provider = new Provider(`http://127.0.0.1:${port}`, {
  jwks: { keys: settings.keys },
  clients: settings.clients.map((client) => ({
    client_id: client.id,
    client_secret: client.secret,
    grant_types: ["client_credentials"],
    redirect_uris: [],
    response_types: [],
  })),
  extraTokenClaims: (_, token) => clientOf(token.clientId).claims,
  features: {
    clientCredentials: { enabled: true },
    devInteractions: { enabled: false },
    resourceIndicators: {
      enabled: true,
      getResourceServerInfo: (_, resource, client) => ({
        scope: "",
        audience: resource,
        accessTokenFormat: "jwt",
        accessTokenTTL: clientOf(client.clientId).lasts_s,
        jwt: { sign: { alg: settings.keys[0].alg } },
      }),
    },
  },
});
provider.listen(Number(port), "127.0.0.1");
