{{/* Refuse declared objects that `moiety apply` would refuse after the installation. */}}

{{- define "moiety.validateDeclared" -}}
{{- $declared := .Values.declared -}}
{{- $classes := concat (list "priority" "standard" "flex" "batch") $declared.existingClasses -}}
{{- range $declared.classes }}{{ $classes = append $classes .name }}{{ end -}}
{{- $used := dict -}}
{{- range $declared.classes }}{{ if .downgrade_to }}{{ $_ := set $used (printf "declared.classes (%s).downgrade_to" .name) .downgrade_to }}{{ end }}{{ end -}}
{{- range $declared.tenants }}{{ if .service_class }}{{ $_ := set $used (printf "declared.tenants (%s).service_class" .name) .service_class }}{{ end }}{{ end -}}
{{- range $declared.prices }}{{ if .service_class }}{{ $_ := set $used (printf "declared.prices (%s).service_class" .model) .service_class }}{{ end }}{{ end -}}
{{- range $declared.issuers }}{{ if .service_class }}{{ $_ := set $used (printf "declared.issuers (%s).service_class" .name) .service_class }}{{ end }}{{ end -}}
{{- range $path, $class := $used -}}
{{- if not (has $class $classes) -}}
{{- fail (printf "%s is %s, and there is no such class: use one of %s, declare it in declared.classes, or name it in declared.existingClasses if it exists" $path $class (join ", " $classes)) -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "classes" "tenants" "routes" "guardrails" "issuers" "webhooks" -}}
{{- $names := list -}}
{{- range get $declared $kind -}}
{{- if has .name $names -}}
{{- fail (printf "declared.%s has two entries named %s: give each its own name" $kind .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- end -}}
{{- $secrets := list (include "moiety.secret" .) (include "moiety.ownerSecret" .) -}}
{{- range include "moiety.declaredSecretNames" . | fromJsonArray -}}
{{- if has . $secrets -}}
{{- fail (printf "declared has the keySecret %s twice, or it is a Secret of the release: give each key and webhook its own Secret" .) -}}
{{- end -}}
{{- $secrets = append $secrets . -}}
{{- end -}}
{{- end -}}
