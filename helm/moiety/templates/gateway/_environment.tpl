{{/* Of (list root part): the variables of a gateway, which the check before an upgrade reads too. */}}
{{- define "moiety.gatewayEnv" -}}
{{- $root := index . 0 -}}
- {{- include "moiety.databaseVariable" $root | nindent 2 }}
- {{- include "moiety.fromSecret" (list $root "pepper" "MOIETY_KEY_PEPPER") | nindent 2 }}
- {{- include "moiety.fromSecretIfThere" (list $root "pepper-next" "MOIETY_KEY_PEPPER_NEXT") | nindent 2 }}
- {{- include "moiety.fromSecretIfThere" (list $root "pepper-previous" "MOIETY_KEY_PEPPER_PREVIOUS") | nindent 2 }}
- {{- include "moiety.fromSecret" (list $root "curve-engine-public" "MOIETY_CURVE_SERVER_KEY") | nindent 2 }}
- {{- include "moiety.fromSecret" (list $root "curve-gateway-public" "MOIETY_CURVE_PUBLIC_KEY") | nindent 2 }}
- {{- include "moiety.fromSecret" (list $root "curve-gateway-secret" "MOIETY_CURVE_SECRET_KEY") | nindent 2 }}
{{- if $root.Values.traces.enabled }}
- {{- include "moiety.fromSecret" (list $root "traces-token" "MOIETY_TRACES_TOKEN") | nindent 2 }}
{{- end }}
{{- with (index . 1).extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
